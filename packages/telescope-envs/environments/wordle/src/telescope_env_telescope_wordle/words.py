"""The hidden words: common English words of five letters."""

_TEXT = """
about above abuse actor acute admit adopt adult after again agent agree ahead alarm album alert
alike alive allow alone along alter among anger angle angry apart apple apply arena argue arise
array aside asset audio avoid award aware badly baker bases basic basis beach beard beast began
begin being below bench berry birth black blade blame blank blast blaze blend bless blind block
blood bloom blown board boast bonus boost booth bound brain brake brand brass brave bread break
breed brick bride brief bring broad broke brook brown brush build built bunch burst buyer cabin
cable camel candy cargo carry carve catch cause cease chain chair chalk charm chart chase cheap
check cheek cheer chess chest chief child chill choir chord chose civic civil claim clash class
clean clear clerk click cliff climb cling clock close cloth cloud clown coach coast color comic
coral couch cough could count court cover crack craft crane crash crawl crazy cream creek crest
crime crisp cross crowd crown crude cruel crush cubic curve cycle daily dairy dance dated dealt
death debut decay delay delta dense depth devil diary dirty donor doubt dough dozen draft drain
drama drank dream dress dried drift drill drink drive drove drown drunk dusty dwell dying eager
eagle early earth eight elbow elder elect elite empty enemy enjoy enter entry equal error essay
event every exact exist extra fable facet faint fairy faith false fancy fatal fault favor feast
fence ferry fever fiber field fiery fifth fifty fight final first fixed flame flash fleet flesh
float flock flood floor flour fluid flute focus force forge forth forty forum found frame fraud
fresh fried front frost fruit fully funny ghost giant given glare glass gleam globe gloom glory
glove grace grade grain grand grant grape graph grasp grass grave great greed green greet grief
grill grind groan groom gross group grove grown guard guess guest guide guilt habit hairy handy
happy harsh haste hatch haunt heart heavy hedge hello hence hobby honey honor horse hotel hound
house human humor hurry ideal image imply index inner input irony issue ivory jelly jewel joint
joker judge juice juicy karma kayak kneel knife knock known label labor large laser later laugh
layer learn lease least leave legal lemon level lever light limit linen liver local lodge logic
loose lorry lover lower loyal lucky lunar lunch lying magic major maker maple march marry match
maybe mayor medal media melon mercy merge merit merry metal meter midst might minor minus mixed
model money month moral motor mount mouse mouth movie muddy music naive naked nasty naval nerve
never newly night ninth noble noise north novel nurse oasis occur ocean offer often olive onion
opera orbit order organ other ought ounce outer owner paint panel panic paper party pasta patch
pause peace peach pearl pedal penny phase phone photo piano piece pilot pinch pitch place plain
plane plant plate plaza plead point polar porch pouch pound power press price pride prime print
prior prize probe proof proud prove proxy pulse punch pupil puppy purse queen query quest queue
quick quiet quilt quite quota quote radar radio raise rally ranch range rapid ratio razor reach
react ready realm rebel refer relax relay reply rider ridge rifle right rigid risky rival river
roast robot rocky roman rough round route royal rugby ruler rural rusty sadly saint salad salon
salty sandy sauce scale scare scarf scene scent scope score scout scrap screw seize sense serve
seven shade shaft shake shall shame shape share shark sharp sheep sheer sheet shelf shell shift
shine shirt shock shore short shout shown shrug sight silky silly since siren sixth sixty skill
skirt skull slate sleep slept slice slide slope small smart smell smile smoke snake sneak solar
solid solve sorry sound south space spare spark speak spear speed spell spend spent spice spike
spill spine split spoil spoke spoon sport spray squad stack staff stage stain stair stake stale
stamp stand stare start state steak steal steam steel steep steer stick stiff still sting stock
stole stone stood stool store storm story stout stove strap straw strip stuck study stuff style
sugar suite sunny super surge swamp swarm swear sweat sweep sweet swell swept swift swing sword
table taken taste taxes teach tempo tenor tense tenth thank theft their theme there thick thief
thigh thing think third thorn those three threw throw thumb tiger tight timer tired title toast
today token tooth topic torch total touch tough towel tower toxic trace track trade trail train
trait trash treat trend trial tribe trick truck truly trunk trust truth tulip tutor twice twist
ultra uncle under union unite unity until upper upset urban usage usual vague valid value valve
vault venue verse video virus visit vital vivid vocal voice voter wagon waist waste watch water
weary weave wedge weigh weird whale wheat wheel where which while white whole whose widen widow
width witch woman world worry worse worst worth would wound woven wrath wreck wrist write wrong
wrote yacht yearn yeast yield young youth zebra
"""
WORDS = tuple(_TEXT.split())
